"""The CPU engine: what the V2 model runner needs to run adaptive verification without a GPU."""
