"""dispatch: does a speed-up of a mixture-of-experts language model keep its tokens? See README.md."""

__version__ = "0.1.0"
