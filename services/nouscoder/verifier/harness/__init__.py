"""The code that runs inside a sandbox. It uses only the standard library and one byte stream to the gateway.

`__main__.py` is started by its path in an isolated interpreter (`-I -S`). It loads this folder as the package
`nouscoder_harness`, so that it runs where the project is not installed (gVisor, pods). The gateway imports `frames`.
"""
