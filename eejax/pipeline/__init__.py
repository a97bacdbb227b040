"""Pipeline schedules as tables, and what executes and costs them."""
