"""The composition root: reads settings, places and supervises workers, speaks to people.

The only package that imports ray, the only one that reads the environment. Every other part gets
values.
"""
