"""What people look at, made by programs: the Grafana dashboard. No part of the product."""
