"""Every error that gdscache raises: one class per cause, the values in the message, the setting to change in the hint.

All classes derive from `GdsCacheError`, survive pickling (they cross processes), and never carry KV bytes or tokens.
"""

from __future__ import annotations

_LONGEST = 4000  # characters of a message, or of a hint


def printable(text: str, *, lines: bool = False) -> str:
    """The text with control characters written out; `lines`: except line ends."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else ascii(c)[1:-1] for c in text)


def _told(text: str) -> str:
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} [... {len(text) - _LONGEST:,} characters ...] {text[-_LONGEST // 2 :]}"
    return printable(text, lines=True)


class GdsCacheError(Exception):
    """Base of all errors. `message` tells the failure, with its values; `hint` names the setting to change.

    Both may quote outside text: they are cut to 4,000 characters, and control characters are written out.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = _told(message), _told(hint)
        super().__init__(self.message, self.hint)

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class _NumberedError(GdsCacheError):
    def __init__(self, message: str, hint: str = "", errno: int | None = None) -> None:
        super().__init__(message, hint)
        self.errno = errno


class ConfigError(GdsCacheError):
    """A configuration that cannot be used; its subclasses name the cause."""


class ConfigFileError(ConfigError):
    """The configuration file is missing, unreadable or not YAML."""


class UnknownKeyError(ConfigError):
    """A key that no model knows. The message names the file, the key and the nearest known one."""


class InvalidValueError(ConfigError):
    """A value of the wrong type or out of range."""


class CapacityError(ConfigError):
    """A tier or buffer too small to hold one page."""


class GeometryError(ConfigError):
    """A model geometry that describes no page: missing, contradictory or unknown fields."""


class StorageError(GdsCacheError):
    """The SSD tier cannot be opened; its subclasses name the cause."""


class NotADirectoryPathError(StorageError):
    """The SSD path exists and is not a directory."""


class NotARegularFileError(StorageError):
    """Something else (a link, a directory, a device) stands where the cache keeps a file of its own."""


class DirectoryNotWritableError(StorageError):
    """The SSD path cannot be created or written."""


class NoSpaceError(StorageError):
    """The file system has less room than the slab needs."""


class DirectoryInUseError(StorageError):
    """Another process (or another engine of this one) owns the directory."""


class DirectoryPermissionsError(StorageError):
    """Others than the user may write to the directory."""


class CatalogVersionError(StorageError):
    """The catalogue was written by another version of the format."""


class ExtentSizeError(StorageError):
    """The directory holds extents of another size."""


class ShardsError(StorageError):
    """The directory holds pages in another number of shards."""


class StripeError(StorageError):
    """The directories of a striped slab are not those it was written to: one is missing, swapped, foreign or new."""


class TransportUnavailableError(StorageError):
    """The configured transport, or a hardware path set to `on`, cannot work on this machine."""


class TierUnavailableError(StorageError):
    """A tier that the configuration names by its class cannot be opened."""


class TierAnswerError(StorageError):
    """A tier of the user's own, or the client of a pool, returns an impossible answer."""


class ShortIOError(StorageError):
    """Fewer bytes were moved than asked for."""


class IOFailedError(_NumberedError, StorageError):
    """A read or write failed. `errno` is kept where the system gave one."""


class PageGoneError(StorageError):
    """A page is not where its tier keeps it, for example because a shared pool has removed the object. Its tier forgets
    the page."""


class PageBytesError(StorageError):
    """A page's bytes differ from the stored ones. Its tier forgets the page."""


class LockLostError(IOFailedError):
    """Another process may use the directory: a lock, or a file that it locks, lost its name."""


class DeviceError(GdsCacheError):
    """The configured device does not exist here, or does not fit the arguments."""


class NoMemoryError(GdsCacheError):
    """There is less memory, on the host or on the GPU, than a tier or a buffer asks for. The message names the key."""


class PinnedMemoryError(GdsCacheError):
    """Host memory could not be page-locked, without which copies to the GPU cannot be measured."""


class KernelUnavailableError(GdsCacheError):
    """A CUDA kernel could not be built; the torch reference serves instead."""


class NativeMissingError(GdsCacheError):
    """The native library is missing, or the system cannot load it."""


class NativeCallError(_NumberedError):
    """The native library refused the arguments of a call, or had no memory for it. `errno` says which."""


class RefusedDiskError(NativeCallError):
    """The system refuses io_uring, or threads, to the native library."""


class CaptureUnsupportedError(GdsCacheError):
    """An operation that CUDA cannot record into a graph was called while one is being recorded."""


class TransferArgumentError(GdsCacheError):
    """Arguments of a kvcacheio operation that do not fit together."""


class PlanesError(GdsCacheError):
    """Attached tensors do not match the configured planes."""


class TokensError(GdsCacheError):
    """Token ids that are not integers in [0, 2**32)."""


class SlotCountError(GdsCacheError):
    """The number of slots does not match the pages they are for."""


class SlotRangeError(GdsCacheError):
    """A slot outside the pool, named twice where it is written, or not an integer."""


class PoolFullError(GdsCacheError):
    """The GPU pool has no room for a sequence; nothing is held."""


class LoadFailedError(GdsCacheError):
    """The verdict on a load is bad. `page` is the first bad page of the sequence, `cause` its status."""

    def __init__(self, message: str, hint: str = "", page: int = -1, cause: str = "") -> None:
        super().__init__(message, hint)
        self.page = page
        self.cause = cause


class DeadlineError(GdsCacheError):
    """A result was not ready within its deadline. It may still become ready; its memory and slots are reserved until
    then."""


class EngineClosedError(GdsCacheError):
    """The engine was closed, by `close()` or because a signal interrupted a call that changed it."""


class CallInCallError(GdsCacheError):
    """A signal's handler called the engine in the middle of another call of the same thread."""


class SequenceStateError(GdsCacheError):
    """A sequence was used after it was left, or published before its pages were complete."""


class UnsupportedRequestError(GdsCacheError):
    """A request of a kind that an integration cannot serve from cached prefixes: padding, beams, ragged rows."""


class IntegrationError(GdsCacheError):
    """An inference engine is set up in a way that its integration refuses; the subclasses name the cause."""


class ParallelismUnsupportedError(IntegrationError):
    """The integration does not serve the way in which the inference engine spreads a model over ranks."""


class CacheGroupsUnsupportedError(IntegrationError):
    """The model's KV cache has several groups, or is of a kind that is not one page of every token."""


class CacheTypeUnsupportedError(IntegrationError):
    """Values of the inference engine's KV cache have a type that is not served."""


class CacheLayoutUnsupportedError(IntegrationError):
    """The bytes of a block of the inference engine's KV cache are not one run."""


class HashSeedError(IntegrationError):
    """The inference engine's hashes of blocks begin with a seed that a restart changes."""


class LoadFailurePolicyError(IntegrationError):
    """The inference engine would end requests whose pages are bad, where it could compute them."""


class ConnectorRoleError(IntegrationError):
    """The inference engine is to hand its KV cache over to another one."""


class SleepModeUnsupportedError(IntegrationError):
    """The inference engine may give up the memory of its KV cache, or its weights, while the cache is open."""


class WeightUpdatesUnsupportedError(IntegrationError):
    """The inference engine may change its weights while the cache is open."""


class SpeculationUnsupportedError(IntegrationError):
    """The inference engine speculates with a second model, whose KV cache has no identity here."""


class AdaptersUnsupportedError(IntegrationError):
    """The inference engine serves adapters whose names may come to mean other weights."""


class EmbeddingsUnsupportedError(IntegrationError):
    """The inference engine serves embeddings, whose forward passes do not begin loads."""


class RopeByLengthError(GeometryError, IntegrationError):
    """The model rotates keys by the length of a request, or of a request in the same batch, and no setting keeps
    requests to one side of the length at which that changes."""


class MediaUnsupportedError(IntegrationError):
    """The inference engine serves images, sounds or videos, which its names of pages do not tell apart for good."""


class AttentionUnsupportedError(IntegrationError):
    """Keys and values of a token depend on tokens behind it, or beside it: a prefix does not name them."""


class InterfaceUnsupportedError(IntegrationError):
    """The integration does not serve the way in which the inference engine is set to hand pages over."""


class LayerHooksError(IntegrationError):
    """A forward pass did not wait for the layers that were being loaded."""


class LoadOrderError(IntegrationError):
    """An order to load names pages that were not brought and checked for its request."""


class VerifiedLoadError(IntegrationError):
    """Pages that had been checked did not reach their blocks, and the step that used them cannot be taken back."""


class MissingPackageError(GdsCacheError):
    """An optional package that a command needs is not installed; the hint names the extra."""


class WeightsNotFoundError(GdsCacheError):
    """A model's place has no files of weights, or they cannot be read."""


class ForkedProcessError(GdsCacheError):
    """A forked child uses an engine of its parent process. `owner` is the pid of that process."""

    def __init__(self, message: str, hint: str = "", owner: int = 0) -> None:
        super().__init__(message, hint)
        self.owner = owner


class RankError(GdsCacheError):
    """A rank cannot be reached, or cannot do its leader's request."""


class RankMismatchError(RankError):
    """Leader and ranks do not fit each other: versions, planes, blocks."""


class RankLostError(RankError):
    """A rank has ended, hangs, or does not answer in time."""


class RankProtocolError(RankError):
    """A connection between a leader and a rank carries invalid bytes, or belongs to another user."""


class MetricsAddressError(GdsCacheError):
    """Metrics cannot be served at the address that the configuration names."""


class ThreadStartError(GdsCacheError):
    """The system has no thread for the engine, which then does not open."""
