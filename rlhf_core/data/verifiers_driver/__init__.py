"""Runs an environment of the package `verifiers`, in the interpreter that has it.

Imports only the standard library and verifiers, nothing from alignflow: `data/rows/verifiers_rows` starts it
by its folder, and its files import each other relative to that folder. The first argument is a mode. Requests
are lines of JSON on stdin; the first one names the environment: `{"name", "options"}`. In every mode the
driver replies `{"problem": SENTENCE}` if the environment cannot be used. The environment's output goes to
stderr.

    release  out  {"verifiers": VERSION, "code": digest of the environment's Python files}
    rows     in   also "count" (null: all) and "dataset" (train or eval)
             out  {"task": what `serve` takes, "prompt": [messages], "answer": ...}, a line each
    serve    in   also "url" and "key", of the endpoint that answers for the policy
             out  {"ready": true}
             in   {"start": ID, "task": ..., "model": the model that this episode's requests name}
                  {"cancel": ID}
             out  {"id": ID, "reward": ..., "metrics": {...}}, {"id": ID, "error": ..., "raised": TYPE}, or
                  {"id": ID, "cancelled": true}
"""
