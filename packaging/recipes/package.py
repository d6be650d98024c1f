# SPDX-License-Identifier: Apache-2.0
# For Spack: the C++ library, and its parts as variants. packaging/recipes/check.sh builds it.
from spack.package import *

try:
    from spack_repo.builtin.build_systems.meson import MesonPackage
except ImportError:
    pass  # Before Spack 1.0, the line above has imported it.


class Muster(MesonPackage):
    """Gathers and exports of sharded models."""

    # spack dev-build takes the sources of the current folder.
    has_code = True
    version("0.2.0")

    license("Apache-2.0")
    variant("mpi", default=True, description="Jobs over MPI")
    variant("cuda", default=False, description="Tensors on NVIDIA devices")
    variant("python", default=False, description="The Python package")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("meson@1.0:", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("cmake", type="build")
    depends_on("boost@1.74:")
    depends_on("cli11")
    depends_on("fmt")
    depends_on("hdf5@1.10:")
    depends_on("isa-l")
    depends_on("nlohmann-json")
    depends_on("re2")
    depends_on("xxhash")
    depends_on("zlib-api")
    depends_on("zstd")
    depends_on("mpi", when="+mpi")
    extends("python@3.10:", when="+python")
    depends_on("py-nanobind@2:", when="+python")

    def setup_build_environment(self, env):
        # Meson looks for Boost there, and in no other prefix of Spack.
        env.set("BOOST_ROOT", self.spec["boost"].prefix)

    def meson_args(self):
        def feature(name):
            return f"-D{name}={'enabled' if self.spec.satisfies('+' + name) else 'disabled'}"

        return ["-Dtests=false", "-Dbenches=false", feature("mpi"), feature("cuda"), feature("python")]
