"""Features of real models: the tokens that an attention layer meets, on real images and real text.

``encoders`` cuts models after their first blocks and computes features, ``corpora`` gives the
images and the text, ``pretrained`` trains small models for machines that reach no hub, and ``hub``
fetches the published ones.
"""
