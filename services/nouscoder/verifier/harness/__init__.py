"""What runs inside a sandbox: standard library only, no project import, one byte stream to the gateway.

`__main__.py` is started by file path in a bare interpreter (`-I -S`) and loads this folder as the package
`nouscoder_harness`, so it also runs where the project is not installed (gVisor, pods). The gateway imports `frames`.
"""
