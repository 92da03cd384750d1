"""The main job: real RL jobs run alone, then share one accelerator, and every figure is measured.

``task`` what is asked · ``verifier`` who checks it · ``model`` and ``grpo`` the training · ``job`` one
training process · ``accounting`` what the operating system says · ``blocks`` runs of such processes ·
``runner`` the whole demo · ``report`` what is said about it.
"""
