"""Experiments: an index over many runs, their comparison, and MLflow's runs beside them.

In: folders of runs and stores of MLflow, which stay the truth. Out: an SQLite index that may be deleted at any time,
lists, a page, and files that MLflow's importer reads.

Open `run_index.py` first. `scan.py` finds what there is; `run_folders.py`, `mlflow_files.py`, `mlflow_database.py` and
`mlflow_json.py` read it, all as the `RunRecord` of `record.py`; `query.py` is the language of conditions, `compare.py`
the page.
"""
