"""The exceptions a user can meet.

Every message is one line: what was seen, what is allowed, what to do about it.

    DgemmaError
    ├── UserError            a mistake that the caller can mend; the command line exits with 2
    │   ├── PromptError      messages, image places, context length
    │   ├── ImageError       a picture that cannot be read or is out of bounds
    │   ├── OptionError      a sampler, stopping or length option out of range
    │   ├── CheckpointError  a model that is absent, damaged, incomplete or of another kind
    │   ├── OutputError      a result that cannot be written
    │   └── SessionError     a saved session that is damaged or of another checkpoint
    └── Failure              the machine's fault; the command line exits with 1
"""


class DgemmaError(Exception):
    """Root of every error that dgemma raises on purpose."""


class UserError(DgemmaError):
    """A mistake that the caller can mend."""


class PromptError(UserError):
    """Messages, image places or a length that no prompt can have."""


class ImageError(UserError):
    """A picture that cannot be read or is out of bounds."""


class OptionError(UserError):
    """An option out of its range."""


class CheckpointError(UserError):
    """A model that is absent, damaged, incomplete or of another kind."""


class OutputError(UserError):
    """A result that cannot be written."""


class SessionError(UserError):
    """A saved session that is damaged, or belongs to another checkpoint."""


class Failure(DgemmaError):
    """Something that the caller did not cause and cannot mend by another input."""
