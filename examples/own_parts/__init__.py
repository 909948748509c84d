"""Parts of your own, named in settings by their import path. Each file says where its name goes.

The folder that holds your package must be on Python's path of the process (`PYTHONPATH`, or install it).
"""
