"""The Ray Serve application: ``serve run serve_config.yaml``, or ``sam3-ray serve``.

Other Serve applications call it without HTTP (see ``sam3_ray.serve.ingress.Ingress.predict``)::

    answer = await serve.get_app_handle("sam3").predict.remote(image=file_bytes, prompts=["car"])
"""
