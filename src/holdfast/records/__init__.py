"""Values that stages hand on. Nothing in here opens a file, talks to a rank or imports torch at import time."""
