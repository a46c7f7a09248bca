"""Token ids as text: by the model's own tokenizer where it is found, else as numbers."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from spile.core.errors import ConfigError, SpileError
from spile.core.identity import full_digest
from spile.core.recipe import ResolvedRecipe
from spile.models.files.demo import demo_directory
from spile.objects.paths import AnyPath, path_of

_FILES = ("tokenizer.json", "tokenizer_config.json")  # what a recipe's digest is of
_CUT = "\ufffd"  # what is left of a character whose last token is missing


class Texts:
    """A dataset's tokens, as they are read.

    Attributes:
        missing: why there is no tokenizer; None if there is one.
        note: what is to be known of the one that is used.
    """

    def __init__(self, recipe: ResolvedRecipe, given: str | None) -> None:
        """`given`: the directory or URL of `--tokenizer`.

        Raises:
            ConfigError: if that holds no tokenizer.
        """
        self._tokenizer: Tokenizer | None = None
        self.missing: str | None = None
        self.note: str | None = None
        source = given or recipe.model_source
        # A store is a stranger's: what it names is read of this machine, and never fetched.
        if not given and "://" in source:
            self.missing = f"the model is not on this machine ({source}): give --tokenizer"
            return
        folder = demo_directory() if source == "demo" else path_of(source)
        try:
            self._tokenizer = Tokenizer.from_buffer((folder / _FILES[0]).read_bytes())
        except Exception as error:  # the Rust library raises bare Exception
            if given:
                raise ConfigError(f"--tokenizer {given}: no usable tokenizer.json there") from error
            self.missing = f"no usable tokenizer.json in {source}: give --tokenizer"
            return
        if _differs(folder, recipe):
            self.note = "this tokenizer is not the one that the dataset was made with"
            if not given:
                self._tokenizer = None
                self.missing = f"{source} holds another tokenizer by now: give --tokenizer"

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; a character of several tokens is its last one's."""
        if self._tokenizer is None:
            return [str(token) for token in ids]
        pieces: list[str] = []
        waiting: list[int] = []  # places of tokens whose character has not ended
        stream = DecodeStream(skip_special_tokens=False)
        for place, token in enumerate(ids):
            if self._tokenizer.id_to_token(token) is None:
                pieces.append(f"⟨{token}⟩")
                continue
            try:
                piece = stream.step(self._tokenizer, token)
            except Exception:  # a sequence that no text has: such tokens stand alone
                stream = DecodeStream(skip_special_tokens=False)
                piece = self._tokenizer.decode([token], skip_special_tokens=False)
            waiting = [] if piece is not None else [*waiting, place]
            pieces.append(piece or "")
        for place in waiting:
            pieces[place] = _CUT
        return pieces

    def spellings(self, text: str) -> list[list[int]]:
        """Token ids that a text has at the beginning of a document, and after a space."""
        if self._tokenizer is None:
            return []
        tokenizer = self._tokenizer
        found = [
            tokenizer.encode(before + text, add_special_tokens=False).ids for before in ("", " ")
        ]
        return [ids for number, ids in enumerate(found) if ids and ids not in found[:number]]


def _differs(folder: AnyPath, recipe: ResolvedRecipe) -> bool:
    known = recipe.model.get("tokenizer")
    if known is None:
        return False
    try:
        return full_digest(*(p for p in (folder / name for name in _FILES) if p.is_file())) != known
    except (OSError, SpileError):
        return True
