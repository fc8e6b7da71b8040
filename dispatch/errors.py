"""What can go wrong, as one tree. Every message says what was found, what was expected, and the way out.

DispatchError
├── InputError            a caller's value is out of range (also a ValueError)
├── LoadError             a model is not what its checkpoint and its code say
│   └── RepairError       a known transformers incompatibility could not be repaired
├── BackendError          the machine cannot run the kernels that were asked for
├── EngineError           the exact engine does not know a model, which then runs on its own code
├── NonFiniteLogitsError  a model gave inf or NaN where a token was to be picked
├── CacheError            a key/value cache does not hold what it must
└── DrafterError          a drafter broke its contract, or does not fit the target
"""


class DispatchError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(DispatchError, ValueError):
    """A caller's value is out of range."""


class LoadError(DispatchError):
    """A model is not what its checkpoint and its code say it is."""


class RepairError(LoadError):
    """A known transformers incompatibility applies and could not be repaired."""


class BackendError(DispatchError):
    """The machine cannot run the kernels that were asked for."""


class EngineError(DispatchError):
    """The exact engine does not know a model: something in it is not a part of DeepSeek-MoE V1 or Llama."""


class NonFiniteLogitsError(DispatchError):
    """A model gave inf or NaN where a token was to be picked; argmax of such a row means nothing."""


class CacheError(DispatchError):
    """A key/value cache does not hold what it must, or cannot be rolled back."""


class DrafterError(DispatchError):
    """A drafter broke its contract, or does not fit the target."""
