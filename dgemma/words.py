"""A tokenizer read straight from tokenizer.json, and chat templates: transformers' methods of the same names, without its import.

Importing transformers takes seconds, more than a small checkpoint's first answer. Where a checkpoint's own tokenizer_config.json
says that tokenizer.json is all there is to its tokenizer, the library underneath transformers' fast tokenizers reads it
directly; any other class of tokenizer is transformers' business (`load`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from .config import read_json
from .errors import CheckpointError

# Classes of transformers that take tokenizer.json as it is.
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder: a Words, or transformers' own. Raises CheckpointError, or what they raise."""
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    if (folder / "tokenizer.json").exists() and settings.get("tokenizer_class") in PLAIN and "auto_map" not in settings:
        return Words.open(folder, settings)
    from transformers import AutoTokenizer  # here, as the module's docstring says

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


class Words:
    """The tokenizer of one tokenizer.json; every method does what transformers' of that name does."""

    def __init__(self, backend: Any, special: dict[str, str], chat_template: str | None):
        """`backend` is a tokenizers.Tokenizer, `special` maps roles (bos_token, ...) to tokens."""
        self._backend, self.special_tokens_map, self.chat_template = backend, special, chat_template

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> Words:
        """From a folder's files and its tokenizer_config.json. CheckpointError."""
        from tokenizers import AddedToken, Tokenizer  # here: `dgemma info` needs no tokenizer

        path = folder / "tokenizer.json"
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise CheckpointError(f"{path}: no tokenizer that can be read ({str(error).splitlines()[0]})") from None
        backend.no_padding()
        backend.no_truncation()
        special = _special(settings)
        known = {name: backend.token_to_id(name) for name in special.values()}
        marked = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        # A token that the config gives a role is special even if tokenizer.json does not say so.
        backend.add_special_tokens(
            [AddedToken(name, special=True, normalized=False) for name, i in known.items() if i is not None and i not in marked]
        )
        return cls(backend, special, _template(folder, settings))

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of token ids. Spaces are never cleaned up: that would change what was written."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The names of token ids; None for an id that there is not."""
        return [self._backend.id_to_token(int(i)) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each of several; None for one that there is not."""
        if isinstance(tokens, str):
            return self._backend.token_to_id(tokens)
        return [self._backend.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Every token's id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """The ids of tokens that stand beside the model's own vocabulary."""
        return {token.content: i for i, token in self.added_tokens_decoder.items()}

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The same by id, as tokenizers.AddedToken."""
        return self._backend.get_added_tokens_decoder()

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> Any:
        """A conversation as the template writes it: token ids, or text."""
        text = _compiled(self.chat_template if chat_template is None else chat_template).render(
            self.special_tokens_map
            | {"messages": conversation, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
            | variables
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _special(settings: dict[str, Any]) -> dict[str, str]:
    """Tokens with a role, from tokenizer_config.json: each `..._token`, and those of `extra_special_tokens`."""
    extra = settings.get("extra_special_tokens")
    given = {name: value for name, value in settings.items() if name.endswith("_token")}
    given |= extra if isinstance(extra, dict) else {}
    found = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: chat_template.jinja's, else tokenizer_config.json's (of several, the one named default)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """A template as transformers sets jinja up for it (its documentation, "Chat templates: advanced usage")."""
    import jinja2.ext  # here: only a prompt needs it
    import jinja2.sandbox  # here, as above

    class Generation(jinja2.ext.Extension):
        """`{% generation %} ... {% endgeneration %}` marks what a model wrote; for a prompt it is just its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[Any]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **style)  # jinja's own would escape for HTML

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template)
