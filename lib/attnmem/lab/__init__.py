"""Trainings at scale: the published grids, the engine, and the rows that trainings leave."""
