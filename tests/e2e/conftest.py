"""As in the chaos tests: compiled programs are kept, and no process is left behind."""

from chaos.conftest import compilation_cache, no_process_is_left

__all__ = ["compilation_cache", "no_process_is_left"]
