"""The prompts of the default matrix: one each of prose, code, a known function to complete, and heavy repetition."""

PROMPTS: dict[str, str] = {
    "prose": "The module provides a",
    "code": "class Foo:\n    def __init__(self, name):\n        self.name = name\n\n    def __repr__(self):\n",
    "known-function": "def fibonacci(n):\n    ",
    "repetition": "x = [1, 2, 3]\n",
}
