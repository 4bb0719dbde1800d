"""Keeps secrets out of what a run writes: settings, commands, diffs, failure records, environment.

A secret is recognized by its name (`api_key`, `HF_TOKEN`), by its shape (`ghp_...`, a private key, the password in a
URL) or by its value (that of an environment variable with a secret name, wherever it occurs). This cannot find
everything: a secret with an ordinary name and without a known shape is not redacted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

REDACTED = "[redacted]"

# Names are compared as lower-case words joined by "_": HF_TOKEN, hfToken and hf-token are all "hf_token".
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_NAME = re.compile(
    r"""
    (?:password|passwd|passphrase|passcode|secret|apikey)s?(?:_|$)    # also glued to what is before: PGPASSWORD
    | (?:^|_)(?:credentials?|creds?|jwt|cookies?|authorization|otp|psk)(?:_|$)
    | (?:access|account|api|app|auth|client|deploy|encryption|hmac|license|master|pass|private|secret|service
        |shared|signing|ssh|storage|subscription|wandb)_?keys?(?:_|$)        # a bare `key` is a dictionary's
    | (?:access|api|auth|bearer|hf|hub|refresh|session)_?tok(?:en)?s?$
    | (?:^|_)(?:token|tok|auth)$
    | (?:^|_)(?:alert|webhook)_(?:url|command)$                       # whoever knows it may post there
    | (?:^|(?:admin|db|ftp|http|login|mail|mysql|pg|proxy|redis|root|smtp|ssh|user)_?)(?:pass|pw)$   # not conv_pw
    | (?:^|_|db|root|user)pwd$
    """,
    re.VERBOSE,
)
_PLAIN_NAME = re.compile(
    r"""
    ^old_?pwd$ | ^(?:max|min|n|num|total)_tok$
    | (?:^|_)(?:count|dim|dir|directory|env|file|len|length|names?|path|size|ttl|type|var)$     # password_file
    | (?:^|_)(?:audio|begin|blank|bos|class|cls|dist|distill|empty|end|eos|first|image|last|mask|new|next|null
        |output|pad|patch|prev|previous|prompt|query|register|sep|special|start|stop|sub|text|think|unk|video
        |vision|visual|word)_tok(?:en)?$                                  # what "token" means to a language model
    """,
    re.VERBOSE,
)

# Variables that a run may record: facts about the machine and the launch.
_RECORDED = re.compile(
    r"""
    (?:CUDA|CUDNN|FI|GLOO|GOMP|GPU|HEADWAY|HIP|HSA|IBV|KMP|MKL|MPICH|NCCL|NUMEXPR|NVIDIA|OMP|OMPI_COMM_WORLD
        |OPENBLAS|PMI|PYTORCH|ROCR|SLURM|SLURMD|TORCH|TRITON|UCX)_\w+
    | TORCH\w+ | PMIX_RANK | (?:LOCAL_|NODE_|GROUP_|ROLE_)?RANK | (?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE
    | MASTER_ADDR | MASTER_PORT | CONDA_DEFAULT_ENV | CONDA_PREFIX | VIRTUAL_ENV | LD_LIBRARY_PATH
    | LD_PRELOAD | PATH | PYTHONPATH | PYTHONHASHSEED | HOSTNAME | USER | LOGNAME | SHELL | LANG | LC_ALL
    | TMPDIR | TZ
    """,
    re.VERBOSE,
)

_KNOWN_SHAPE = re.compile(
    r"""
    -----BEGIN[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----|\Z)
    | https://hooks\.slack\.com/services/[\w/]+
    | (?<![A-Za-z0-9]) (?:
          hf_[A-Za-z0-9]{20,}
        | sk-[\w-]{20,}
        | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
        | (?:AKIA|ASIA)[A-Z0-9]{16}
        | xox[a-z]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{10,}
        | AIza[\w-]{35}
        | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*                            # a signed web token
        | wandb_v1_\w{20,} | nvapi-[\w-]{20,} | pypi-[\w-]{20,} | npm_[A-Za-z0-9]{30,}
    )""",
    re.VERBOSE | re.DOTALL,
)
_AFTER_HEAD = tuple(  # group 1 stays, the rest goes
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"""(\b[a-z][a-z0-9+.-]{0,19}://)[^\s/"<>]+(?=@)""",  # https://user:password@host
        r"""([?&](?:sig|x-(?:amz|goog)-(?:signature|credential))=)[^&\s"']+""",
        r"""(\bauthorization["']?\s*[:=]\s*["']?\w+[ ]+)[^\s"']+""",
        r"""(\bbearer\s+)[a-z0-9._~+/=-]{12,}""",
    )
)

# The head of a named value, and the value after it. Heads are found first, since a value may contain more heads.
_NAME = r"(?P<name>[A-Za-z_][\w.\-]{0,99})"
_TYPE = r"(?:Optional\[)?(?:Any|SecretStr|bytes|int|str)\]?(?:[ ]\|[ ]None)?"
_QUOTED = r"""[rbufRBUF]{0,2}(?P<quote>"{3}|'{3}|["'])(?:\\.|(?!(?P=quote))[^\\\n])*(?P=quote)"""
_NAMED_VALUES = tuple(
    (re.compile(head, re.VERBOSE | re.MULTILINE), re.compile(value))
    for head, value in (
        # a plain YAML value runs to the end of its line; `key: str = ...` is Python
        (rf"""^[+\-]?[ \t]*(?:-[ \t]+)?["']?{_NAME}["']?:[ \t]+(?!{_TYPE}[ ]=)""", r"""[^\s"'\[{][^\n]*"""),
        # key=..., "key": ..., environ["KEY"] = ..., key: str = ..., --key=...
        (
            rf"""(?<![\w.\-])-{{0,2}}{_NAME}\\?["']?\]?[ \t]*
                (?: :[ \t]*[\w.\[\],\ |]{{1,80}}?[ \t]*=(?!=) | :=|=>|==|!=|=|: )[ \t]*""",
            rf"{_QUOTED}|[^\s&]+",
        ),
        # --key VALUE
        (rf"(?<![\w\-])--{_NAME}[ \t]+", rf"{_QUOTED}|[^\s\-]\S*"),
        # ("key", "VALUE")
        (rf"""["'](?:--)?{_NAME}["']\s*,\s*""", _QUOTED),
    )
)
_NUMBER = re.compile(r"""["']?[-+]?[\d.,_]+(?:e[-+]?\d+)?[kKMGTB]?(?:/s)?["']?[,;:)\]}]*""")
_PLACE = re.compile(r"""["']?(?:[/~.$]|[A-Za-z]:\\)""")
_NOT_A_SECRET = re.compile(rf"(?:(?i:none|null|true|false)|~|{_TYPE})?[,;:)\]}}]*", re.VERBOSE)
_SHORTEST_SECRET = 6  # of an environment variable; shorter values ("1", "true") occur in any text


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Returns whether a setting, option or variable of this name holds a secret.

    >>> list(filter(is_secret_name, ["HF_TOKEN", "apiKey", "db-password", "max_tokens", "cls_token"]))
    ['HF_TOKEN', 'apiKey', 'db-password']
    """
    words = _words(name)
    if name.lstrip("-") == "PWD":  # the shell's working directory; `pwd` is a password
        return False
    return bool(_SECRET_NAME.search(words)) and not _PLAIN_NAME.search(words)


def _words(name: str) -> str:
    return "_".join(_WORD.findall(name)).lower()


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the text with everything that looks like a secret replaced.

    >>> redact("git clone https://me:hunter2@example.org/x && WANDB_API_KEY=0123abcd train.py", {})
    'git clone https://[redacted]@example.org/x && WANDB_API_KEY=[redacted] train.py'
    """
    for secret in _secret_values(environ):
        text = text.replace(secret, REDACTED)
    text = _KNOWN_SHAPE.sub(REDACTED, text)
    for pattern in _AFTER_HEAD:
        text = pattern.sub(rf"\1{REDACTED}", text)
    for head, value in _NAMED_VALUES:
        text = "".join(_without_values(text, head, value))
    return text


@lru_cache(maxsize=4096)
def _redact_name(name: str) -> str:
    return redact(name)


def redact_names(values: Mapping[str, T]) -> dict[str, T]:
    """Returns values by their names, without the secrets in these: a script may make names of metrics of anything."""
    return {_redact_name(name): value for name, value in values.items()}


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Returns a command line without its secrets, even if option and value are separate arguments.

    >>> redact_argv(["train.py", "--api-key", "0123", "--lr", "1e-3", "model.token=abc"])
    ['train.py', '--api-key', '[redacted]', '--lr', '1e-3', 'model.token=[redacted]']
    """
    safe: list[str] = []
    value_is_secret = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if value_is_secret and not argument.startswith("-"):
            safe.append(REDACTED)
        elif equals and is_secret_name(name):
            safe.append(f"{name}={REDACTED}")
        else:
            safe.append(redact(argument))
        value_is_secret = argument.startswith("--") and not equals and is_secret_name(argument)
    return safe


def redact_tree(value: object) -> object:
    """Returns a copy of nested dicts and lists without values under secret names and secrets inside strings.

    >>> redact_tree({"lr": 3e-4, "tracker": {"api_key": "0123", "url": "https://me:pw@host/"}})
    {'lr': 0.0003, 'tracker': {'api_key': '[redacted]', 'url': 'https://[redacted]@host/'}}
    """
    if isinstance(value, Mapping):
        return {
            redact_tree(key): _blank(item)
            if is_secret_name(str(key)) and not _is_harmless(str(key), str(item))
            else redact_tree(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if all(isinstance(item, str) for item in value):
            return redact_argv(value)
        return [redact_tree(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that explain a run (CUDA, NCCL, SLURM, ranks, threads, paths), sorted, without secrets.

    >>> environment({"NCCL_DEBUG": "INFO", "SLURM_JWT": "eyJ...", "AWS_PROFILE": "me"})
    {'NCCL_DEBUG': 'INFO'}
    """
    return {
        name: redact(value, environ)
        for name, value in sorted(environ.items())
        if _RECORDED.fullmatch(name) and not is_secret_name(name) and "KEY" not in name.split("_")
    }


def _secret_values(environ: Mapping[str, str]) -> list[str]:
    """Returns the values of secret variables, split into lines as in a diff or a log, the longest first."""
    values = (value for name, value in environ.items() if is_secret_name(name))
    lines = {line.strip() for value in values for line in value.splitlines()}
    return sorted((line for line in lines if len(line) >= _SHORTEST_SECRET), key=len, reverse=True)


def _without_values(text: str, head: re.Pattern[str], value: re.Pattern[str]) -> Iterator[str]:
    """Yields the pieces of the text, with the values after heads of a secret name replaced."""
    end = 0
    for found in head.finditer(text):
        if found.start() < end or not (is_secret_name(found["name"]) or found["name"] == "PWD"):
            continue
        secret = value.match(text, found.end())
        if secret and not _is_harmless(found["name"], secret.group()):
            quote = secret.groupdict().get("quote") or ""
            yield f"{text[end : found.end()]}{quote}{REDACTED}{quote}"
            end = secret.end()
    yield text[end:]


def _is_harmless(name: str, value: str) -> bool:
    """Returns whether this value with a secret name is not a secret: for some short names, only the value shows it."""
    if name == "PWD":  # UID=me;PWD=hunter2
        return bool(_PLACE.match(value))
    if _words(name) in ("tok", "pass") and _NUMBER.fullmatch(value):  # tok=1.2M, pass: 2
        return True
    return bool(_NOT_A_SECRET.fullmatch(value))


def _blank(value: object) -> object:
    """Returns the shape of a value without its contents; True, False and None are not secrets."""
    if isinstance(value, Mapping):
        return {redact_tree(key): _blank(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_blank(item) for item in value]
    return value if value is None or isinstance(value, bool) else REDACTED
