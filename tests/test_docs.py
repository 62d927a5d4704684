"""Documentation names files that exist, and its links resolve."""

import re
import tomllib
from pathlib import Path

import pytest
from kagent.cli import app
from typer.main import get_command

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "agent/kagent", ROOT / "sandbox/kagent_sandbox")
BASES = (ROOT, *PACKAGES)
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "AGENTS", "CONTRIBUTING", "CHANGELOG")),
    *(ROOT / name / "README.md" for name in ("prompts", "corpus", "runs")),
]
FOLDERS = {p.name for base in BASES for p in base.iterdir() if p.is_dir()} - {".git", ".venv"}
SUFFIXES = (".py", ".md", ".toml", ".svg")
ELSEWHERE = re.compile(  # files of a task, a run or an exported library, and placeholders
    r"prompts/[\dN]|replies/|operators/|kernels/$|build/torch-|\d.*\.md|.*\bNAME\b"
    r"|benchmarks/bench\.py|tests/$|tests/fuzz$|(task|item|family|kagent)\.toml|.*/\."
)
"""Names that a page may use although the repository has no such file at its top."""
OF_TASKS = {"reference.py", "operator.py", "bench.py", "try_namespaces.py"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def named_paths(text: str) -> list[str]:
    """Inline code that looks like a path of this repository: `judge/timing/`, `docs/x.md`."""
    words = (code.split(" ")[0] for code in re.findall(r"`([^`\n]+)`", text))
    paths = [w for w in words if re.fullmatch(r"[\w.*/-]+", w) and not ELSEWHERE.match(w)]
    return [p for p in paths if "/" in p and (p.split("/")[0] in FOLDERS or p.endswith(SUFFIXES))]


def exists(path: str, page: Path) -> bool:
    """Whether a path exists in the repository, in a package, or beside the page."""
    return any(any(base.glob(path.rstrip("/"))) for base in (*BASES, page.parent))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_paths_in_backticks_exist(page: Path) -> None:
    assert not [path for path in named_paths(prose(page)) if not exists(path, page)]


@each_page
def test_pages_and_scripts_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w/<])((?:docs|benchmarks|corpus)/[\w/.-]+\.\w+)", prose(page))
    assert not [p for p in named if not ELSEWHERE.match(p) and not (ROOT / p).exists()]


@each_page
def test_links_and_anchors_resolve(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if ":" not in path and (not to.exists() or (anchor and anchor not in anchors(to))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("name", ["architecture.md", "glossary.md", "trust.md"])
def test_modules_that_are_named_exist(name: str) -> None:
    """`loop.py` alone is a module of one of the packages."""
    named = re.findall(r"`(\w+\.py)`", prose(ROOT / "docs" / name))
    found = {p.name for package in PACKAGES for p in package.rglob("*.py")}
    assert not [module for module in named if module not in found | OF_TASKS]


@pytest.mark.parametrize("page", ["AGENTS.md", "docs/architecture.md"])
def test_the_maps_name_every_folder_of_both_packages(page):
    text = (ROOT / page).read_text()
    folders = [p.name for base in PACKAGES for p in base.iterdir() if (p / "__init__.py").is_file()]
    assert len(folders) > 20
    assert [name for name in folders if not re.search(rf"\b{name}\b", text)] == []


def map_of_agents() -> list[list[str]]:
    """Names in AGENTS.md's two columns of folders, from the top down."""
    block = (ROOT / "AGENTS.md").read_text().split("```")[1].strip("\n").splitlines()
    at = block[0].index("sandbox/kagent_sandbox")
    rows = [line for line in block[1:] if line.startswith("  ")]
    columns = [line[2:18] for line in rows], [line[at : at + 11] for line in rows]
    return [[name for names in column for name in names.split()] for column in columns]


def test_the_map_has_the_order_of_the_layers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"][:2]
    for names, contract in zip(map_of_agents(), contracts, strict=True):
        layers = contract["layers"]
        rank = {n.strip(): i for i, layer in enumerate(layers) for n in layer.split("|")}
        places = [rank[name] for name in names if name != "runtime"]  # others carry it: shown last
        assert len(places) > 8
        assert places == sorted(places), names


def commands(group, words=()):
    """Commands of the program by their words, those of groups too."""
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= {(*words, name): command} if inner is None else commands(command, (*words, name))
    return found


COMMANDS = commands(get_command(app))


def test_the_readme_names_every_command():
    text = prose(ROOT / "README.md")
    table = text[text.index("## Commands") : text.index("## Limits")]
    named = set(re.findall(r"`(?:kagent )?([a-z]+)", table))
    assert len(COMMANDS) > 30
    assert sorted({words[0] for words in COMMANDS} - named) == []


def typed(text: str) -> list[list[str]]:
    """Words of the lines of `kagent` that a page has in its blocks and as inline code."""
    blocks = "\n".join(re.findall(r"^```.*?^```$", text, flags=re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^(?:\$ )?kagent ([^\n#]+)", blocks, re.MULTILINE)
    lines += re.findall(r"`kagent ([^`\n]+)`", text)
    # What follows -- is a script's; what follows the others is no part of the command.
    return [re.split(r"\s--\s|[|;)]", line.replace("\\|", ","))[0].split() for line in lines]


@each_page
def test_commands_and_options_that_are_named_exist(page: Path) -> None:
    groups = {words[0] for words in COMMANDS} | {"--help", "--install-completion"}
    for words in typed(page.read_text()):
        assert words[0] in groups, words
        keys = (tuple(words[:2]), tuple(words[:1]))
        command = next((COMMANDS[k] for k in keys if k in COMMANDS), None)
        options = (
            {o for p in command.params for o in (*p.opts, *p.secondary_opts)} if command else {}
        )
        given = {w.strip("[],.:").split("=")[0] for w in words[1:] if w.strip("[").startswith("--")}
        assert sorted(given - {*options, "--help"}) == [], words
