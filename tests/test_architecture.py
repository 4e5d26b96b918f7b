"""The tree is the architecture: imports follow the arrows, functions stay short, public names are explained."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"dgemma": "", "attention": "attention", "vision": "vision"}  # folder -> its name inside dgemma

# A module may import those of the floors below its own, and no other; a new module gets a floor here.
FLOORS = [
    {"errors"},
    {"backend", "config", "download", "files", "formats", "kept", "names", "peers", "plain", "presets", "stopping", "template", "tools", "turns"},
    {"channels", "matrices", "stored", "strips"},
    {"beliefs", "flash"},
    {"cpu", "cuda"},
    {"kernels"},
    {"attention.masks", "attention.packing", "attention.reads", "attention.rope", "sampler"},
    {"attention.caches"},
    {"attention"},
    {"vision.preprocess", "vision.tower", "vision.embed", "layers"},
    {"vision"},
    {"canvas"},
    {"model"},
    {"fingerprint", "past", "shelf"},
    {"archive", "hub", "memory", "messages", "step", "weights", "words"},
    {"denoise", "processor"},
    {"interoperation", "settings"},
    {"answer", "reading"},
    {"infill", "session"},
    {"pipeline", "plan"},
    {"__init__"},  # the public names: what follows reads them like any other user
    {"arguments", "render", "writer"},
    {"doctor", "fit", "info", "parsers", "results", "runtime", "terminal"},
    {"convert", "parts", "talk"},
    {"control", "geometry"},
    {"subject"},
    {"bench"},
    {"breakdown"},
    {"cli", "server"},
]
FLOOR = {module: height for height, floor in enumerate(FLOORS) for module in floor}
BESIDE = {"sampler", "stopping"}  # they meet the model in step and denoise, and settings choose among them
MEASURES = {"runtime", "parts"}  # what bench and profile run: a block without end, and the sampler apart from the loop
WITHOUT_MLX = {"errors", "config", "download", "files", "stopping", "hub", "names", "render", "stored", "cli", "vision.preprocess"}
WITHOUT_MLX |= {"arguments", "channels", "parsers", "presets", "results", "template", "tools", "turns"}
LONGEST = 60


@lru_cache(maxsize=None)
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def modules() -> dict[str, Path]:
    """Every module of the package by its name inside dgemma."""
    found = {}
    for folder, name in PACKAGES.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            own = path.stem if not name else name if path.stem == "__init__" else f"{name}.{path.stem}"
            found[own] = path
    return found


MODULES = modules()
SCRIPTS = [path for folder in ("examples", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def absolute(node: ast.Import | ast.ImportFrom, module: str) -> list[str]:
    """What an import statement names, written out: `from . import masks` in attention is dgemma.attention.masks."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not node.level:
        base = node.module or ""
    else:
        package = ["dgemma", *module.split(".")]
        is_package = MODULES[module].name == "__init__.py"
        depth = node.level - 1 if is_package and module != "__init__" else node.level
        package = package[: len(package) - depth]
        base = ".".join(package + ([node.module] if node.module else []))
    return [base] + [f"{base}.{alias.name}" for alias in node.names]


def imports(module: str) -> list[tuple[int, str]]:
    """(line, module of dgemma) for each import in `module`, those inside functions included."""
    found = []
    for node in ast.walk(tree(MODULES[module])):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [name for name in absolute(node, module) if name == "dgemma" or name.startswith("dgemma.")]
        inside = [name.removeprefix("dgemma").lstrip(".") for name in names]
        known = [name for name in inside if name in MODULES]
        if known:
            found += [(node.lineno, name) for name in known if not any(o.startswith(f"{name}.") for o in known)]
        elif names:  # a name of the package itself, such as __version__
            found.append((node.lineno, "__init__"))
    return found


def inside_functions(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file that run when a function is called, in the order of the file."""
    found = {}
    for function in ast.walk(tree(path)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.update({node.lineno: node for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom))})
    return [found[line] for line in sorted(found)]


def functions(path: Path) -> list[tuple[str, ast.AST]]:
    """Every function and class of a file with its dotted name; what stands inside a function is its own affair."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.append((prefix + child.name, child))
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")

    visit(tree(path), "")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_arrows(module):
    assert module in FLOOR, f"{module} has no floor: give it one in FLOORS"
    upward = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports(module)
        if FLOOR[name] >= FLOOR[module]
    ]
    assert not upward, f"only what stands below {module} may be imported: {upward}"


@pytest.mark.parametrize("module", sorted(set(MODULES) - MEASURES - {"denoise", "settings", "step"}))
def test_sampler_and_stopping_meet_the_model_only_in_the_loop(module):
    assert not [name for _, name in imports(module) if name in BESIDE - {module}]


def test_the_arrows_are_read_from_every_form_of_import(tmp_path):
    forms = "from . import masks\nfrom .rope import Rotary\nfrom dgemma import kernels\nimport dgemma.model\nfrom dgemma.vision import place\n"
    path = tmp_path / "reads.py"
    path.write_text(forms + "def f():\n    from .. import pipeline\n    from .. import __version__\n")
    kept, MODULES["attention.reads"] = MODULES["attention.reads"], path
    try:
        assert [name for _, name in imports("attention.reads")] == [
            "attention.masks", "attention.rope", "kernels", "model", "vision", "pipeline", "__init__",
        ]  # fmt: skip
    finally:
        MODULES["attention.reads"] = kept


@pytest.mark.parametrize("module", sorted(WITHOUT_MLX))
def test_these_modules_need_no_mlx(module):
    named = [name for node in ast.walk(tree(MODULES[module])) if isinstance(node, ast.Import) for name in absolute(node, module)]
    named += [node.module or "" for node in ast.walk(tree(MODULES[module])) if isinstance(node, ast.ImportFrom) and not node.level]
    assert not [name for name in named if name.split(".")[0] == "mlx"]


@pytest.mark.parametrize("module", MODULES)
def test_an_import_inside_a_function_gives_its_reason(module):
    """In a comment on its line or above it; a module that is imported so again needs none the second time."""
    lines, explained, bare = MODULES[module].read_text().splitlines(), set(), []
    for node in inside_functions(MODULES[module]):
        name = ast.unparse(node)
        above = lines[node.lineno - 2].strip()
        if "#" in lines[node.lineno - 1] or above.startswith("#"):
            explained.add(name)
        elif name not in explained:
            bare.append(f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {name}")
    assert not bare, bare


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_explained(module):
    assert ast.get_docstring(tree(MODULES[module])), f"{module} has no docstring"
    silent = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {name}"
        for name, node in functions(MODULES[module])
        if not any(part.startswith("_") for part in name.split(".")) and not ast.get_docstring(node)
    ]
    assert not silent, silent


@pytest.mark.parametrize("path", [*MODULES.values(), *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_one_thought(path):
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name} has {node.end_lineno - node.lineno + 1} lines"
        for name, node in functions(path)
        if not isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno + 1 > LONGEST
    ]
    assert not long, f"at most {LONGEST} lines: {long}"


def test_torch_is_an_oracle_and_a_trainer_only():
    allowed = (ROOT / "tests" / "oracle", ROOT / "examples" / "demo")
    peers = MODULES["peers"]  # data: dgemma bench hands it to the Python of a peer, and dgemma never runs those parts of it
    found = []
    for path in [*MODULES.values(), *SCRIPTS]:
        if path == peers or any(folder in path.parents for folder in allowed):
            continue
        for node in ast.walk(tree(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            if isinstance(node, (ast.Import, ast.ImportFrom)) and any(name.split(".")[0] == "torch" for name in names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, found
