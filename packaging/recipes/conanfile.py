# SPDX-License-Identifier: Apache-2.0
# For Conan 2: `conan create packaging/recipes`. Not built yet (packaging/recipes/README.md).
import os

from conan import ConanFile
from conan.tools.files import copy
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
        "boost/1.83.0", "cli11/2.3.2", "fmt/9.1.0", "hdf5/1.14.3", "isa-l/2.30.0", "nlohmann_json/3.11.3", "re2/20220601", "xxhash/0.8.2",
        "zlib/[>=1.2.13 <2]", "zstd/1.5.5",
    )
    tool_requires = "meson/[>=1.0 <2]", "pkgconf/[>=2 <3]"

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
        toolchain.project_options.update({"tests": "false", "benches": "false", "python": "disabled", "mpi": "disabled"})
        toolchain.generate()

    def build(self):
        meson = Meson(self)
        meson.configure()
        meson.build()

    def package(self):
        Meson(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        self.cpp_info.libs = ["muster"]
        self.cpp_info.set_property("cmake_target_name", "muster::muster")
