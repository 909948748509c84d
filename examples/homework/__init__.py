"""A student who wants homework in their own voice, and a teacher who wants grading that is specific and friendly.

`python -m examples.homework --endpoint http://127.0.0.1:8000/v1`; see docs/evaluation.md. What the original of this
scenario only counted is scored here: correctness against ground truth, style by rules, both on the first answer, before
any complaint, and on the last one.
"""
