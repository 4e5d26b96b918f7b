"""Run the notebooks and store what they show: python examples/notebooks/run_notebooks.py [NOTEBOOK ...]"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm misses a widget that nothing here shows


def run(path):
    """The notebook at `path`, executed from its own folder; what would differ from run to run is left out."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data.pop("image/jpeg", None)  # Pillow shows a picture in both
    return notebook


def main():
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        nbformat.write(run(path), path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
