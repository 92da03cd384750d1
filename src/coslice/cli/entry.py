"""What the ``coslice`` script calls: inside training images only the client may be installed."""

import sys


def main() -> None:
    try:
        from coslice.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "coslice":
            raise
        sys.exit(f"coslice: {error.name} is missing: the command line needs `pip install 'coslice[server]'`")
    run()
