"""State in Redis: jobs, rounds, callbacks, workers, and the deployment.

Each structure has one module. Each change of several steps is one Lua script. Every key starts with
`poc:`. All keys except the deployment have a TTL (deployments.py). Redis Cluster is refused
(poc_core/redis_at): a cluster needs all key names in advance, but the scripts derive some names.
"""
