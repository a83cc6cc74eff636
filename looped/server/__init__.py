"""OpenAI-compatible HTTP over the engine.

One thread owns the engine (`engine_thread.py`) and is the only one that touches torch. The asyncio side checks requests
(`protocol.py`, `admission.py`), hands them over through a queue and writes what comes back (`responses.py`, `sse.py`).
"""
