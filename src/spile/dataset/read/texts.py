"""The text of stored tokens, by the tokenizer of the model that read them. No jax."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from spile.core.cache_dir import demo_directory
from spile.core.errors import ConfigError, SpileError
from spile.core.identity import full_digest
from spile.core.panics import without_panic
from spile.core.recipe import ResolvedRecipe
from spile.dataset.format import TOKENIZER_FILES
from spile.objects.memory import MemoryObjects
from spile.objects.paths import AnyPath, RemotePath, path_of

_CUT = "\ufffd"  # shown for a character whose last token is missing
_GAP = "…"  # stands for tokens that were not kept


class Texts:
    """A dataset's tokens as text.

    Attributes:
        tokenizer: None if it is not available.
        missing: the reason, in that case.
        note: a remark about the tokenizer in use, if any.
    """

    def __init__(
        self,
        recipe: ResolvedRecipe,
        given: str | None = None,
        own: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load a tokenizer: that in `given`, the dataset's own, or the model's.

        Args:
            given: a directory or URL to use instead of the others.
            own: the files that the dataset holds, by name.

        Raises:
            ConfigError: if `given` holds no tokenizer.
        """
        self.tokenizer: Tokenizer | None = None
        self.missing: str | None = None
        self.note: str | None = None
        source = given or recipe.model_source
        if own and not given:
            source, folder = "the dataset", _folder_of(own)
        elif "://" in source and not given:
            # A store is untrusted: the path it names is read on this machine, and never fetched.
            self.missing = f"the model is not on this machine ({source})"
            return
        else:
            folder = demo_directory() if source == "demo" else path_of(source)
        self.folder: AnyPath = folder
        path = folder / TOKENIZER_FILES[0]
        try:
            with without_panic(path):
                tokenizer = Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the Rust library raises bare Exception
            if given:
                raise ConfigError(f"{given}: no usable tokenizer.json there") from error
            self.missing = f"no usable tokenizer.json in {source}"
            return
        if _differs(folder, recipe):
            if not given:
                self.missing = f"{source} holds another tokenizer by now"
                return
            self.note = "this tokenizer is not the one that the dataset was made with"
        self.tokenizer = tokenizer

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text; a split character counts for its last token."""
        if self.tokenizer is None:
            return [str(token) for token in ids]
        pieces: list[str] = []
        waiting: list[int] = []  # positions of tokens whose character is incomplete
        stream = DecodeStream(skip_special_tokens=False)
        for place, token in enumerate(ids):
            if self.tokenizer.id_to_token(token) is None:
                pieces.append(f"⟨{token}⟩")
                continue
            try:
                piece = stream.step(self.tokenizer, token)
            except Exception:  # an impossible sequence: decode the token alone
                stream = DecodeStream(skip_special_tokens=False)
                piece = self.tokenizer.decode([token], skip_special_tokens=False)
            waiting = [] if piece is not None else [*waiting, place]
            pieces.append(piece or "")
        for place in waiting:
            pieces[place] = _CUT
        return pieces

    def text(self, index: np.ndarray) -> str:
        """Return the tokens as one text, with a gap where some are missing."""
        return _GAP.join("".join(run) for run in self.runs(index))

    def runs(self, index: np.ndarray) -> Iterable[list[str]]:
        """Yield the pieces of each run of consecutive tokens of a document."""
        breaks = np.flatnonzero(np.diff(index["offset"].astype(np.int64)) != 1) + 1
        for run in np.split(index["token_id"], breaks):
            yield self.pieces(run.tolist())


def _folder_of(files: Mapping[str, bytes]) -> RemotePath:
    """Return files as a folder that can be read like a model's."""
    held = MemoryObjects("tokenizer:/")
    for name, data in files.items():
        held.create(name, data)
    return RemotePath(held, "")


def _differs(folder: AnyPath, recipe: ResolvedRecipe) -> bool:
    known = recipe.model.get("tokenizer")
    if known is None:
        return False
    paths = (folder / name for name in TOKENIZER_FILES)
    try:
        return full_digest(*(path for path in paths if path.is_file())) != known
    except (OSError, SpileError):
        return True
