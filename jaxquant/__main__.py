"""``python -m jaxquant``: what is installed, or a command for GGUF files."""

import sys

from jaxquant._core.information import describe

if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(describe())
    else:
        from jaxquant.ggml.cli import main

        sys.exit(main())
