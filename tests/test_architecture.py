"""The rules that the layers keep."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "tfdist"


def _module(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = sorted(PACKAGE.rglob("*.py"))

# The public API: what a user imports. `errors` is its own implementation; the others pass names on.
PUBLIC = {
    "__init__",
    "__main__",
    "callbacks",
    "collective",
    "compression",
    "elastic",
    "global_batch",
    "monitoring",
    "pipeline",
    "ray",
    "spark",
}
# From the bottom to the top; a package imports only itself and what is below it.
LAYERS = [
    {"_version", "errors"},
    {"progress_file"},
    {"options"},
    {"log"},
    {"cluster"},
    {"internals"},
    {"native"},
    {"comm"},
    {"xla"},
    {"global_view"},
    {"monitoring"},
    {"compression"},
    {"group"},
    {"data"},
    {"strategy"},
    {"sharding"},
    {"keras"},
    {"snapshots"},
    {"recovery"},
    {"pipeline"},
    {"callbacks"},
    {"launch"},
    {"ray", "spark"},
]
# The same within the larger packages; what is not named here is above all of it.
PARTS = {
    "cluster": [
        "cluster_spec",
        "tf_config",
        "net",
        "auth",
        "session",
        "rendezvous",
        "resolvers",
        "membership",
        "observation",
        "mesh",
    ],
    "compression": ["transport", "codecs", "auto", "policy", "compressor"],
    "keras": [
        "patching",
        "optimizers",
        "global_batch",
        "older_keras",
        "batch_statistics",
        "saving",
        "fit",
    ],
    "pipeline": [
        "plan",
        "schedules",
        "simulation",
        "partition",
        "placement",
        "stages",
        "runtime",
        "state",
        "model",
    ],
    "launch": [
        "console",
        "job",
        "hosts",
        "restart_policy",
        "restart_all",
        "restart_one",
        "supervisor",
        "flight",
        "live",
        "ssh",
        "commands",
        "cli",
    ],
}
WITHOUT_TENSORFLOW = {
    "_version",
    "errors",
    "progress_file",
    "options",
    "log",
    "cluster",
    "launch",
}
READS_ENVIRONMENT = {"options", "cluster", "launch", "ray", "spark"}


MODULES = {_module(path) for path in FILES}


@functools.cache
def _parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def _layer(path: pathlib.Path) -> str:
    """The layer of a file: a name in `LAYERS`, or in `PUBLIC`."""
    return _below(_module(path)) or "__init__"


def _below(module: str) -> str:
    """The first name of a module below `tfdist` or `tfdist._src`."""
    return module.removeprefix("tfdist").removeprefix("._src").removeprefix(".").split(".")[0]


def _is_public(module: str) -> bool:
    return not module.startswith("tfdist._src") and _below(module) in PUBLIC | {""}


@functools.cache
def _imports(path: pathlib.Path) -> list[str]:
    names = []
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def test_imports_go_down():
    height = {name: i for i, names in enumerate(LAYERS) for name in names}
    offenders = []
    for path in FILES:
        own = _layer(path)
        if _is_public(_module(path)):
            continue
        for name in _imports(path):
            below = _below(name)
            if name.startswith("tfdist.") and below in height and below != own:
                offenders += [f"{path} imports {name}"] * (height[below] >= height[own])
    assert not offenders


def test_each_package_has_its_layer():
    known = {name for names in LAYERS for name in names} | PUBLIC | {"_src"}
    assert {_layer(path) for path in FILES} <= known


def test_the_implementation_does_not_import_the_public_api():
    assert not [
        f"{path} imports {name}"
        for path in FILES
        for name in _imports(path)
        if not _is_public(_module(path)) and name.startswith("tfdist.") and _is_public(name)
    ]


def test_public_modules_only_pass_names_on():
    for path in FILES:
        if _is_public(_module(path)) and _layer(path) != "__init__":
            defined = [
                n for n in _parse(path).body if isinstance(n, (ast.ClassDef, ast.FunctionDef))
            ]
            assert {n.name for n in defined} <= {"__getattr__", "__dir__"}, path


def test_imports_go_down_within_packages():
    offenders = []
    for package, parts in PARTS.items():
        height = {f"tfdist._src.{package}.{name}": i for i, name in enumerate(parts)}
        for path in [path for path in FILES if _module(path).startswith(f"tfdist._src.{package}.")]:
            own = _part(_module(path))
            for part in {_part(name) for name in _imports(path)} & MODULES - {own}:
                if part.startswith(f"tfdist._src.{package}."):
                    above = height.get(part, len(parts)) >= height.get(own, len(parts))
                    offenders += [f"{path} imports {part}"] * above
    assert not offenders


def _part(module: str) -> str:
    """The first three names of a module's, as in `tfdist._src.cluster.mesh`."""
    return ".".join(module.split(".")[:3])


def test_private_names_are_in_one_place():
    private = ("tensorflow.python", "keras.src")
    assert not [
        f"{path} imports {name}"
        for path in FILES
        for name in _imports(path)
        if name.startswith(private) and _layer(path) != "internals"
    ]


def test_some_packages_do_not_import_tensorflow():
    assert not [
        f"{path} imports {name}"
        for path in FILES
        for name in _imports(path)
        if name.split(".")[0] in ("tensorflow", "keras") and _layer(path) in WITHOUT_TENSORFLOW
    ]


def test_only_the_lower_layers_read_the_environment():
    above = [path for path in FILES if _layer(path) not in READS_ENVIRONMENT]
    assert not [str(p) for p in above if re.search(r"os\.environ|getenv", p.read_text())]


def test_messages_go_to_the_logger():
    """Except errors of the command line."""
    writers = [path for path in FILES if re.search(r"sys\.stderr", path.read_text())]
    assert {_module(path) for path in writers} == {"tfdist._src.log", "tfdist._src.launch.cli"}


def test_names_of_variables_are_in_one_place():
    """Messages and help texts may mention a variable; no other constant is the name of one."""
    offenders = []
    for path in FILES:
        if _layer(path) != "options":
            constants = [node for node in ast.walk(_parse(path)) if isinstance(node, ast.Constant)]
            texts = [node for node in constants if isinstance(node.value, str)]
            names = [node for node in texts if re.fullmatch(r"TFDIST_\w*", node.value)]
            offenders += [f"{path}:{node.lineno} {node.value}" for node in names]
    assert not offenders


def test_exit_codes_are_in_one_place():
    """Calls that end a process use names for codes other than 0 and 1."""
    offenders = []
    for path in FILES:
        for call in ast.walk(_parse(path)):
            if isinstance(call, ast.Call) and _name(call.func) in ("exit", "_exit", "SystemExit"):
                codes = [node for code in call.args for node in ast.walk(code)]
                numbers = [n.value for n in codes if isinstance(n, ast.Constant)]
                if any(type(number) is int and number > 1 for number in numbers):
                    offenders.append(f"{path}:{call.lineno} {ast.unparse(call)}")
    assert not offenders


def _name(function: ast.expr) -> str:
    """The last part of a dotted name."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def test_the_core_reads_no_settings_from_the_environment():
    """Python passes them. The exception is a variable of NCCL."""
    files = [path for path in (PACKAGE / "csrc").rglob("*") if path.is_file()]
    reads = [line for path in files for line in re.findall(r"getenv\(.*", path.read_text())]
    assert reads == ['getenv("NCCL_MULTI_RANK_GPU_ENABLE");']


def test_a_file_says_what_it_is():
    assert not [str(p) for p in FILES if not ast.get_docstring(_parse(p))]


def test_files_have_one_subject():
    """A file is as long as its subject; few subjects are as long as this."""
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert max(lengths.values()) <= 1100
    assert len([path for path, length in lengths.items() if length > 700]) <= 12


def test_imports_have_no_cycles():
    graph = {_module(path): _top_level_imports(path) for path in FILES}
    state: dict[str, str] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != "open", " -> ".join((*trail, module))
        if module in state or module not in graph:
            return
        state[module] = "open"
        for name in graph[module] & set(graph):
            visit(name, (*trail, module))
        state[module] = "closed"

    for module in graph:
        visit(module, ())


def _top_level_imports(path: pathlib.Path) -> set[str]:
    """The modules that a module imports when it is imported, and for type checking."""
    names = set()
    body = list(_parse(path).body)
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found = (f"{node.module}.{alias.name}" for alias in node.names)
            names |= {name if name in MODULES else node.module for name in found}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.If):
            body += node.body
    own_package = ".".join(path.relative_to(ROOT).parent.parts)
    return names - {own_package}


def test_extras_are_optional():
    """A module that needs an extra is imported where it is used, or by others that need it."""
    extras = {
        "matplotlib",
        "prometheus_client",
        "pandas",
        "pyarrow",
        "pyspark",
        "ray",
        "tensorboard",
    }
    imported: dict[str, set[str]] = {}
    for path in FILES:
        imported[_module(path)] = names = set()
        body = list(_parse(path).body)
        for node in body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            body += getattr(node, "body", []) if isinstance(node, (ast.If, ast.Try)) else []
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    needing = {m for m, names in imported.items() if {n.split(".")[0] for n in names} & extras}
    while more := {m for m, names in imported.items() if names & needing} - needing:
        needing |= more
    allowed = ("tfdist._src.monitoring.collector", "tfdist.ray", "tfdist.spark")
    allowed += ("tfdist._src.ray", "tfdist._src.spark")
    assert not [module for module in needing if not module.startswith(allowed)]


def test_import_is_fast():
    code = "import sys, tfdist; sys.exit(any(m in sys.modules for m in ('tensorflow', 'keras')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_schedules_are_without_tensorflow():
    code = (
        "import sys, tfdist.pipeline\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The modules with state of a thread: the code that it traces, the steps that it is in, and so on.
THREAD_STATES = {
    "tfdist._src.comm.registry",
    "tfdist._src.data.call_context",
    "tfdist._src.group",
    "tfdist._src.strategy.step",
}


def test_state_of_threads_is_in_few_objects():
    """State that travels from a caller to its callees without being passed is hard to follow."""
    uses = [
        _module(path)
        for path in FILES
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("threading.local", "contextvars.ContextVar")
    ]
    assert sorted(uses) == sorted(THREAD_STATES)
    modules = ("threading.local", "contextvars.ContextVar")
    assert not [path for path in FILES if set(_imports(path)) & set(modules)]


# The modules that read the engine of a strategy without `extended_of`, which gives it its type.
READS_ENGINE = {
    "tfdist._src.internals.keras",
    "tfdist._src.pipeline.placement.strategy",
    "tfdist._src.recovery.agreement",
    "tfdist._src.strategy.extended",
    "tfdist._src.strategy.step",
    "tfdist._src.strategy.variables",
}


def test_engines_are_typed():
    """TensorFlow is untyped, so mypy does not check what follows `strategy.extended`."""
    reads = {
        _module(path)
        for path in FILES
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.Attribute) and node.attr == "extended"
    }
    assert reads == READS_ENGINE


def test_every_folder_is_a_package():
    # A folder without this file works in a checkout, but is not installed.
    for folder in {path.parent for path in FILES}:
        assert (folder / "__init__.py").exists(), folder


def test_the_core_does_not_include_tests():
    headers = [path for path in (PACKAGE / "csrc").rglob("*") if path.is_file()]
    assert not [path for path in headers if '#include "cpp/' in path.read_text()]
