"""The one table of what pages say and no test here runs: why not, and what is checked instead.

A line is found by its page and how it begins; `*` is any page. A command that is neither run nor
here fails its page's test: give it what it needs in `scratch.py`, or an entry below. An entry that
its page needs no more fails, too. What is printed, and no command, stands in a block called `text`.
"""

import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import spile
from chaos.harness import run
from documented.pages import ROOT, Block, Command
from documented.scratch import Scratch
from spile import cli
from spile.core.errors import ConfigError
from spile.core.listening import ListenAddress

Check = Callable[[Command, Scratch], None]


# -- what can be checked of a command ----------------------------------------------------------


def parses(command: Command, scratch: Scratch) -> None:
    """Check that the parser accepts it."""
    parser = cli.make_parser()  # pyright: ignore[reportPrivateUsage]
    words = scratch.filled(command.words)[1:]
    try:
        arguments = parser.parse_args(words)
        if words[0] == "supervise":
            parser.parse_args([word for word in arguments.command if word != "--"])
    except ConfigError as error:
        raise AssertionError(f"{command.page}: {command.text}: {error}") from error


def shows_what_it_would_run(command: Command, scratch: Scratch) -> None:
    """Run the whole command with `--dry-run`: all of it but the other machines."""
    words = scratch.filled(command.words)[1:]
    at = words.index("--") if "--" in words else len(words)
    result = run(*words[:at], "--dry-run", *words[at:])
    assert result.code == 0, result.err
    assert result.out.strip(), command.text


def has_that_target(command: Command, scratch: Scratch) -> None:
    """Check that make knows the target, and that every `spile` in it parses."""
    shown = subprocess.run(
        ["make", "--dry-run", "--directory", str(ROOT), *command.words[1:]],
        capture_output=True, text=True, check=True,
    ).stdout.replace("\\\n", " ")  # fmt: skip
    for line in shown.splitlines():
        _, found, rest = line.partition("/spile ")
        if found:
            parses(Command(command.page, command.line, f"spile {rest}"), scratch)


def can_be_installed(command: Command, scratch: Scratch) -> None:
    """From the checkout, with extras that it has: there is no release on a package index.

    That the wheel installs is tests/e2e/test_wheel.py's.
    """
    for requirement in command.words[2:]:
        requirement_works_today(requirement, command.page)


_OTHERS = ("libtpu",)  # packages of others that pages have people install
_WHEEL = f"./spile-{spile.__version__}-py3-none-any.whl"  # by `make wheel`


def requirement_works_today(requirement: str, page: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, *rest = re.split(r"[\[\],]+", requirement)
    assert name in (".", _WHEEL, *_OTHERS), f"{page}: pip install {requirement}"
    known = {*extras["optional-dependencies"]}
    assert {word for word in rest if word} <= known, f"{page}: {requirement}"


def is_a_script_with_those_flags(command: Command, scratch: Scratch) -> None:
    named = itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), command.words)
    _, script, *words = named  # behind what the shell puts into its environment
    text = (ROOT / script).read_text()
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert f'"{flag}"' in text, f"{script} has no {flag}"


def takes_those_flags(command: Command, scratch: Scratch) -> None:
    """Check it against the script's own help."""
    _, script, *words = command.words
    shown = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=True
    ).stdout
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert flag in shown.split(), f"{script} has no {flag}"


def is_of_our_dockerfile(command: Command, scratch: Scratch) -> None:
    """Check that targets exist, and that the arguments of containers parse."""
    words = command.words
    if "--target" in words:
        stages = re.findall(r"^FROM .* AS (\w+)", (ROOT / "Dockerfile").read_text(), re.M | re.I)
        assert words[words.index("--target") + 1] in stages
    if words[1] == "run":
        rest = words[words.index("IMAGE@sha256:DIGEST") + 1 :]
        parses(Command(command.page, command.line, " ".join(["spile", *rest])), scratch)


def is_another_program(command: Command, scratch: Scratch) -> None:
    """Check only that its quotes are closed: nothing else of it is known here."""
    assert shlex.split(command.text)[0] == command.words[0]


def are_the_clients_flags(command: Command, scratch: Scratch) -> None:
    program = Path(sys.executable).with_name(command.words[0])
    verbs = [word for word in command.words[1:3] if word.islower()]
    shown = subprocess.run(
        [program, *verbs, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(word in shown for word in command.words if word.startswith("--"))


def makes_a_certificate_that_serves(command: Command, scratch: Scratch) -> None:
    """Run it; its files are what --tls-cert and --tls-key take."""
    subprocess.run(command.words, capture_output=True, check=True, cwd=scratch.folder)
    folder = scratch.folder
    ListenAddress("0.0.0.0", tls_cert=f"{folder}/cert.pem", tls_key=f"{folder}/key.pem")


def runs_in_a_shell(command: Command, scratch: Scratch) -> None:
    """Run it, although it is not a command of Spile."""
    if shutil.which("ssh-keygen") is None:
        return  # as tests/dataset/maintain/test_signature.py says
    ran = subprocess.run(
        command.text, shell=True, cwd=scratch.folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def has_that_environment(command: Command, scratch: Scratch) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "VENV := .venv\n" in makefile and "-m venv $(VENV)" in makefile


# -- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instead:
    page: str
    start: str
    why: str
    check: Check

    def covers(self, command: Command) -> bool:
        return self.page in ("*", command.page) and command.text.startswith(self.start)


_NINTH = "spile extract --model demo --corpus demo --keep year --taps resid_post:9"
COMMANDS = (
    Instead("*", "pip install", "the wheel is installed in tests/e2e/test_wheel.py",
            can_be_installed),
    Instead("*", "make ", "is what runs this", has_that_target),
    Instead("*", "spile launch", "machines, clusters and clouds: tests/launch, tests/chaos",
            shows_what_it_would_run),
    Instead("*", "docker ", "no engine here: tests/e2e/test_container.py does what it can",
            is_of_our_dockerfile),
    Instead("docs/deploy.md", "gcloud ", "a cloud: nothing of it can be run here",
            is_another_program),
    Instead("*", "hf ", "the Hub's own client; tests/interop/hub/test_push.py downloads with it",
            are_the_clients_flags),
    Instead("*", "python bench/gpu.py", "needs a GPU; on a CPU in tests/e2e/test_bench.py",
            is_a_script_with_those_flags),
    Instead("docs/larger-models.md", "python bench/streamed.py", "needs a GPU",
            is_a_script_with_those_flags),
    Instead("docs/larger-models.md", "XLA_PYTHON_CLIENT_PREALLOCATE=true", "the same",
            is_a_script_with_those_flags),
    Instead("*", "python bench/exactness.py",
            "takes minutes; tests/models/forward/test_decoder_exactness.py measures with it",
            is_a_script_with_those_flags),
    Instead("*", "python examples/train_sae.py", "takes minutes; tests of its own run it small",
            takes_those_flags),
    Instead("*", "python examples/", "the same", is_a_script_with_those_flags),
    Instead("README.md", "source .venv/bin/activate", "a word of the shell; `make` makes the file",
            has_that_environment),
    Instead("*", "spile serve", "answers until it is stopped: tests of its own ask it", parses),
    Instead("docs/verify.md", "ssh-keygen ", "another program", runs_in_a_shell),
    Instead("docs/verify.md", "echo ", "another program", runs_in_a_shell),
    Instead("docs/verify.md", "env --chdir ", "another program", runs_in_a_shell),
    Instead("docs/web.md", "openssl req", "another program", makes_a_certificate_that_serves),
    Instead("docs/interventions.md", "spile extract --model demo", "all layers of the demo model: "
            "tests/examples/test_steering.py has a small one", parses),
    Instead("docs/sae.md", _NINTH,
            "the page begins with it, for another layer", parses),
    Instead("docs/sae.md", "spile extract --like acts/lora/base", "the adapter takes minutes: "
            "tests/examples/test_train_lora.py trains one", parses),
    Instead("docs/latents.md", "spile extract --model Qwen/Qwen3-1.7B-Base", "28 layers, and an "
            "encoder of each: tests/e2e/test_encode.py has small ones", parses),
    Instead("docs/latents.md", "spile extract --model google/gemma-3-270m", "a transcoder of many "
            "layers: tests/e2e/test_encode.py has a small one", parses),
    Instead("docs/export.md", "spile merge", "datasets of two corpora: "
            "tests/dataset/maintain/test_assemble.py has them", parses),
    Instead("docs/larger-models.md", "spile extract --model meta-llama/Llama-3.3-70B-Instruct",
            "140 GB of weights: tests/run/step/test_sweep.py streams a small model", parses),
    Instead("docs/worlds.md", "spile extract", "sixteen hosts: tests/e2e/test_world.py has three",
            parses),
    Instead("docs/fleets.md", "spile extract … --out gs://B/acts --engine ray",
            "a cluster: tests/chaos/test_ray.py starts one", parses),
    Instead("docs/fleets.md", "spile supervise", "starts processes: tests/chaos/test_supervised.py",
            parses),
    Instead("docs/tpu.md", "spile compile --model DIR", "every option at once, of which some "
            "exclude others; the example below it runs", parses),
    Instead("docs/tpu.md", "spile compile --model Qwen2.5-7B", "as many virtual devices as that "
            "need a process of its own: held against what it prints, beside this", parses),
)  # fmt: skip

# Blocks that are not commands: the page, how the first line begins, and their contents.
NO_COMMANDS = {
    ("docs/architecture.md", "corpus ─►"): "a drawing",
    ("docs/architecture.md", "cli"): "the order of dependencies",
    ("docs/architecture.md", "spile extract --model M"): "the verbs, a line each",
    ("docs/deploy.md", "spile launch TARGET"): "the shape of all that follow",
    ("docs/models.md", "    Family("): "a row of models/config/rows: test_commands.py",
}

# Statements of Python blocks that are not run: page, how they begin, and why not.
_SERVED = "needs a server: tests/interop/flight/test_server.py starts one"
_SPLICED = "docs/sae.md calls a model of its own"
_TRAINED = "trainers have their own environments: tests/interop/test_torch_loader_rows.py"
STATEMENTS = {
    ("docs/architecture.md", "some = ds.latents"): "docs/latents.md has a dataset of latents",
    ("docs/architecture.md", "for batch in spile.connect"): _SERVED,
    ("docs/architecture.md", "m = spile.load_model"): _SPLICED,
    ("docs/architecture.md", "loss = m.loss"): _SPLICED,
    ("docs/reading.md", "for batch in spile.connect"): _SERVED,
    ("docs/reading.md", "batches = spile.connect"): _SERVED,
    ("docs/sae.md", "SAETrainer"): _TRAINED,
    ("docs/sae.md", "trainSAE"): _TRAINED,
    ("docs/export.md", "LanguageModelSAERunnerConfig"): "SAELens has an environment of its own: "
    "tests/interop/export/test_export.py reads and trains with it",
}


def is_no_command(block: Block) -> bool:
    if re.match(r"spile( \[[^]]*\])?: ", block.first):  # what it prints
        return True
    return any(page == block.page and block.first.startswith(start) for page, start in NO_COMMANDS)
