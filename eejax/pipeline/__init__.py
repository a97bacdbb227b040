"""Pipeline parallelism: schedules as tables, stages of a model, their executor and their costs."""
