"""`dspark-serve validate` and `bench`: does adaptive verification keep accuracy, and where does it win?"""
