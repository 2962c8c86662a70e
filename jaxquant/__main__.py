"""``python -m jaxquant``: what is installed."""

from jaxquant._core.information import describe

if __name__ == "__main__":
    print(describe())
