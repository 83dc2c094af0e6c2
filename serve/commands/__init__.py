"""The commands that look and start nothing: plain functions, mounted by the command line."""
