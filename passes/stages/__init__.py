"""Stages: a canonical graph cut where one value crosses, so that each stage has its own layers' weights and caches
(`stage.py`)."""
