"""`python -m holdfast`: the command line where its script is not on the path."""

import sys

# Python has put the current folder first on the import path. What lies there, such as a json.py, must not run. Nothing
# may be imported before this line, not even __future__.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

from holdfast.cli import main

if __name__ == "__main__":
    main()
