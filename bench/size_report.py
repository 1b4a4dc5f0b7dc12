"""Lines a room, the longest functions and the longest files; what is over the limits is marked.

Limits (lines): a function 60, a file 400. The report never fails: growth is for people to judge.
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

FUNCTION_LIMIT = 60
FILE_LIMIT = 400
SHOWN = 12
ROOT = Path(__file__).resolve().parents[1]
PACKAGE_DEPTH = 3  # python/sonar_engine/<room>


def tracked_sources() -> list[Path]:
    """Python and Rust files under version control, links left out."""
    listing = subprocess.run(["git", "ls-files", "*.py", "*.pyi", "*.rs"], cwd=ROOT, capture_output=True, check=True)
    paths = [Path(name) for name in listing.stdout.decode().splitlines()]
    return [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


def room(path: Path) -> str:
    """The folder a file is counted under: one level inside the package, else its top two folders."""
    depth = PACKAGE_DEPTH if path.parts[0] == "python" else 2
    return "/".join(path.parent.parts[:depth]) or "."


def python_functions(path: Path) -> list[tuple[int, str]]:
    """(lines, place) of every function of one Python file."""
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.lineno} {node.name}") for node in nodes]


def rust_functions(path: Path) -> list[tuple[int, str]]:
    """(lines, place) of every function of one Rust file; a body ends at the brace under its `fn` (rustfmt's layout)."""
    lines = (ROOT / path).read_text().splitlines()
    found = []
    for start, line in enumerate(lines):
        head = line.lstrip()
        if "fn " not in head.split("(")[0] or head.startswith("//"):
            continue
        indent = len(line) - len(head)
        closing = " " * indent + "}"
        end = next((i for i in range(start, len(lines)) if lines[i] == closing), start)
        found.append((end - start + 1, f"{path}:{start + 1} {head.split('(')[0].split('fn ')[-1]}"))
    return found


def mark(length: int, limit: int) -> str:
    return "  over the limit" if length > limit else ""


def main() -> None:
    paths = tracked_sources()
    sizes = {path: len((ROOT / path).read_text().splitlines()) for path in paths}
    rooms: Counter[str] = Counter()
    for path, size in sizes.items():
        rooms[room(path)] += size
    print(f"{sum(sizes.values()):7,} lines in {len(paths)} files")
    for name, size in sorted(rooms.items()):
        print(f"{size:7,}  {name}")
    functions = [
        item for path in paths for item in (rust_functions(path) if path.suffix == ".rs" else python_functions(path))
    ]
    print(f"\nLongest functions (limit {FUNCTION_LIMIT})")
    for length, place in sorted(functions, reverse=True)[:SHOWN]:
        print(f"{length:7}  {place}{mark(length, FUNCTION_LIMIT)}")
    print(f"\nLongest files (limit {FILE_LIMIT})")
    for path, size in sorted(sizes.items(), key=lambda item: -item[1])[:SHOWN]:
        print(f"{size:7}  {path}{mark(size, FILE_LIMIT)}")


if __name__ == "__main__":
    main()
