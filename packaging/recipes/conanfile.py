# SPDX-License-Identifier: Apache-2.0
# For Conan 2: `conan create packaging/recipes -s compiler.cppstd=20`. packaging/recipes/check.sh builds it.
import os

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, rmdir
from conan.tools.gnu import PkgConfigDeps
from conan.tools.meson import Meson, MesonToolchain


class Muster(ConanFile):
    name = "muster"
    version = "0.2.0"
    license = "Apache-2.0"
    description = "Gathers and exports of sharded models"
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False]}
    default_options = {"shared": True, "boost/*:header_only": True}
    requires = (
        "boost/1.83.0", "cli11/2.3.2", "fmt/9.1.0", "hdf5/1.14.3", "isa-l/2.30.0", "nlohmann_json/3.11.3", "re2/20230301", "xxhash/0.8.2",
        "zlib/[>=1.2.13 <2]", "zstd/1.5.5",
    )
    tool_requires = "meson/[>=1.0 <2]", "pkgconf/[>=2.0 <3]"

    def validate(self):
        check_min_cppstd(self, 20)

    def export_sources(self):
        root = os.path.join(self.recipe_folder, "..", "..")
        for pattern in ("meson.build", "meson_options.txt", "LICENSE", "include/*", "src/*", "tools/*", "python/*", "cmake/*", "examples/*"):
            copy(self, pattern, root, self.export_sources_folder)

    def layout(self):
        self.folders.build = "build"
        self.folders.generators = "build/conan"

    def generate(self):
        PkgConfigDeps(self).generate()
        toolchain = MesonToolchain(self)
        options = {"tests": False, "benches": False, "python": "disabled", "mpi": "disabled", "cuda": "disabled"}
        # Conan's own choice is bin, where the folder of the HDF5 reader and the command would have the same name.
        toolchain.project_options.update({**options, "libexecdir": "libexec"})
        toolchain.generate()

    def build(self):
        meson = Meson(self)
        meson.configure()
        meson.build()

    def package(self):
        Meson(self).install()
        # Conan generates these files for each consumer.
        for folder in ("cmake", "pkgconfig"):
            rmdir(self, os.path.join(self.package_folder, "lib", folder))
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        self.cpp_info.libs = ["muster"]
        if not self.options.shared:
            self.cpp_info.system_libs = ["dl", "pthread"]
        self.cpp_info.set_property("cmake_target_name", "muster::muster")
