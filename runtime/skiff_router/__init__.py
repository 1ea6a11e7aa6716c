"""The router: one URL for all models, in front of the pods that serve them. It knows neither torch nor kopf."""
