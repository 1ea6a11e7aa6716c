"""ModelCaches: models that fetchers keep on nodes, and the volumes by which InferenceServices mount them."""
