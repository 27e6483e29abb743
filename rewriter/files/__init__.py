"""Model files: loaded without trust, and written without ever leaving a broken output; on a POSIX file system."""
