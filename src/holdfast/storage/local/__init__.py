"""A folder of a POSIX file system."""
