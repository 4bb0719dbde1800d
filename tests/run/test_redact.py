from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from headway.system.redact import REDACTED, environment, is_secret_name, redact, redact_argv, redact_tree

SECRET_NAMES = """
    api_key apiKey APIKey apikey OPENAI_APIKEY WANDB_API_KEY api_key_1 token HF_TOKEN hfToken github_token auth_token
    access_tokens hub_token password PGPASSWORD db-password passwords secret clientSecret AWS_SECRET_ACCESS_KEY
    AWS_ACCESS_KEY_ID AccountKey credential credentials private_key SSH_PRIVATE_KEY signing_key SLURM_JWT db_pass
    pwd Pwd MYSQL_PWD userpwd dbPwd --pwd pw dbpw user_pw smtp_pass pass passkey pass_key passkeys PASSCODE creds
    tok authTok api_tok wifi_psk otp_seed smtp_pwd cookie Authorization tracker.api_key --token ssh_key encryption_key
""".split()  # noqa: SIM905 - a list to read, not to parse
PLAIN_NAMES = """
    tokenizer max_tokens n_tokens token_dim tokens token_ids tokens_per_second pad_token cls_token mask_token
    keyboard key keys sort_key query_key num_keys monkey PWD OLDPWD old_pwd n_tok max_tok pad_tok toks
    conv_pw pw_conv forward_pass bypass passes cred_size compass author authors
    password_file SSH_AUTH_SOCK HF_TOKEN_PATH secret_name lr batch_size hidden
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_name_of_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_name_of_no_secret(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 12,
        "sk-" + "aB3" * 12,
        "sk-proj-" + "aB_3-" * 8,
        "ghp_" + "aB3" * 12,
        "github_pat_" + "aB3_" * 12,
        "AKIA" + "A1" * 8,
        "xoxb-123456789012-abcdef",
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "https://hooks.slack.com/services/T000/B000/XXXX",
        "-----BEGIN RSA PRIVATE KEY-----\n+MIIabc\n+def==\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_known_shapes_are_found_in_any_text(secret: str) -> None:
    assert redact(f"loading with ({secret}), see log", {}) == f"loading with ({REDACTED}), see log"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/x?a=1", "https://[redacted]@host/x?a=1"),
        ("https://token@host", "https://[redacted]@host"),
        ("https://a:p@ss@host/x", "https://[redacted]@host/x"),
        ("s3://b/k?X-Amz-Signature=abc&x=1", "s3://b/k?X-Amz-Signature=[redacted]&x=1"),
        ("http://host/?token=abc&lr=3", "http://host/?token=[redacted]&lr=3"),
        ("--api-key abc --lr 1", "--api-key [redacted] --lr 1"),
        ("--token=abc --lr=1", "--token=[redacted] --lr=1"),
        ('{"api_key": "a b", "lr": 3}', '{"api_key": "[redacted]", "lr": 3}'),
        ("password: my long phrase\nlr: 3", "password: [redacted]\nlr: 3"),
        ("+  api_key: abc", "+  api_key: [redacted]"),
        ('api_key: str = "abc"', 'api_key: str = "[redacted]"'),
        ('def f(api_key: Key = "abc", n=1)', 'def f(api_key: Key = "[redacted]", n=1)'),
        ("os.environ['HF_TOKEN'] = 'a b'", "os.environ['HF_TOKEN'] = '[redacted]'"),
        ('setdefault("HF_TOKEN", "abc")', 'setdefault("HF_TOKEN", "[redacted]")'),
        ('x = f"token=abc"', 'x = f"token=[redacted]'),
        ("http://host/?tok=a1b2&pw=x&lr=3", "http://host/?tok=[redacted]&pw=[redacted]&lr=3"),
        ("UID=sa;PWD=hunter2;x", "UID=sa;PWD=[redacted]"),
        ('conn = "user=me pwd=hunter2 lr=3"', 'conn = "user=me pwd=[redacted] lr=3"'),
        ('PWD="hunter2"', 'PWD="[redacted]"'),
        ("passkey: my phrase\nlr: 3", "passkey: [redacted]\nlr: 3"),
        ("--pw abc --lr 1", "--pw [redacted] --lr 1"),
        ("Authorization: Bearer abc.def", "Authorization: [redacted]"),
        ("sent 'bearer abcdefghijklmnop'", "sent 'bearer [redacted]'"),
    ],
)
def test_named_secrets_in_text(text: str, expected: str) -> None:
    assert redact(text, {}) == expected
    assert redact(expected, {}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=4096 tokenizer=gpt2",
        "step 7 tok=1.2M tok: 3,500/s, pass=2",
        "PWD=/home/me OLDPWD=/home",
        "self.conv_pw = nn.Conv2d(3, 8, 1)",
        "token: str | None = None,",
        "api_key: str",
        "f(token=None, retry=3)",
        "https://example.org/a@b/c:d",
        "task-0123456789012345678901234567890",
        "self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))",
        "commit 0ec96dc63a0b8495f3243a0c8c7d41984ed285ac",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text, {}) == text


def test_values_of_secret_variables_are_found_anywhere() -> None:
    environ = {"MY_TOKEN": "hunter22", "DB_PASSWORD": "hunter22-long", "OTHER_TOKEN": "short", "LR": "hunter"}
    assert redact("a hunter22 b hunter22-long c short d hunter", environ) == (
        "a [redacted] b [redacted] c short d hunter"
    )
    key = "-- head --\nfirst-line-of-it\nsecond-line-of-it"
    assert redact("+first-line-of-it\n+second-line-of-it", {"SSH_KEY": key}) == "+[redacted]\n+[redacted]"


def test_argv() -> None:
    argv = [
        "train.py",
        "--api-key",
        "a b",
        "--token=x y",
        "tracker.password=a b",
        "--verbose",
        "--token",
        "--lr",
        "1",
    ]
    assert redact_argv(argv) == [
        "train.py", "--api-key", REDACTED, f"--token={REDACTED}", f"tracker.password={REDACTED}", "--verbose",
        "--token", "--lr", "1",
    ]  # fmt: skip


def test_tree() -> None:
    tree = {
        "lr": 3e-4,
        "token": "abc",
        "tok": "abc",
        "pass": 2,
        "password": 12345678,
        "auth": {"user": "me", "pin": 5, "list": ["a", None, True]},
        "command": ["curl", "--token", "abc"],
        "urls": [{"url": "https://me:pw@host/"}, 3],
    }
    assert redact_tree(tree) == {
        "lr": 3e-4,
        "token": REDACTED,
        "tok": REDACTED,
        "pass": 2,
        "password": REDACTED,
        "auth": {"user": REDACTED, "pin": REDACTED, "list": [REDACTED, None, True]},
        "command": ["curl", "--token", REDACTED],
        "urls": [{"url": "https://[redacted]@host/"}, 3],
    }


def test_environment_is_an_allow_list() -> None:
    kept = {
        "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1", "RANK": "0",
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "PMI_RANK": "0", "PMIX_RANK": "0",
        "PYTORCH_ALLOC_CONF": "x", "TORCHELASTIC_RUN_ID": "y", "TORCH_LOGS": "+dynamo", "HEADWAY_RUN": "r",
        "CONDA_PREFIX": "/c", "VIRTUAL_ENV": "/v", "USER": "me", "PYTHONPATH": "/p", "LD_LIBRARY_PATH": "/l",
        "GLOO_SOCKET_IFNAME": "eth0", "MKL_NUM_THREADS": "1", "HOSTNAME": "n1",
    }  # fmt: skip
    dropped = {
        "SLURM_JWT": "a", "HEADWAY_KEY": "b", "HEADWAY_RUN_KEY": "c", "AWS_PROFILE": "d", "HF_TOKEN": "verysecret",
        "HOME": "/h", "MY_RANK": "3", "BASH_FUNC_x%%": "() { :; }", "SLURM_API_TOKEN": "e",
    }  # fmt: skip
    assert environment(kept | dropped) == kept
    assert environment({"PYTHONPATH": "/x/verysecret/y", "HF_TOKEN": "verysecret"}) == {
        "PYTHONPATH": "/x/[redacted]/y"
    }


@given(
    st.text(),
    st.sampled_from([name for name in SECRET_NAMES if name not in ("tok", "pass")]),
    st.text(st.characters(exclude_characters='"\\\n'), min_size=1),
)
def test_redaction_is_total_and_settles(text: str, name: str, value: str) -> None:
    once = redact(f'{text}\n{name.lstrip("-")} = "{value}"', {})
    assert redact(once, {}) == once
    assert once.endswith(f'"{REDACTED}"') or value.lower() in ("none", "null", "true", "false")


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a.b-",
        "x: ",
        '"',
        "\\'",
        "-",
        "--a ",
        "https://",
        "+ \t",
        "eyJ",
        "bearer ",
        "token = (",
        "a\t",
        "k, ",
    ],
)
def test_long_text_takes_linear_time(piece: str) -> None:
    start = time.perf_counter()
    redact(piece * (300_000 // len(piece)), {})
    assert time.perf_counter() - start < 10  # about 0.1 s; quadratic would be hours
