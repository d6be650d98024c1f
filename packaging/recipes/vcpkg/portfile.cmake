# SPDX-License-Identifier: Apache-2.0
# For vcpkg, as an overlay port. Never built (packaging/recipes/README.md).
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
vcpkg_configure_meson(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -Dtests=false -Dbenches=false -Dpython=disabled -Dmpi=disabled
  # Meson does not search the flags of vcpkg for Boost.
  ADDITIONAL_PROPERTIES "boost_root = '${CURRENT_INSTALLED_DIR}'"
)
vcpkg_install_meson()
vcpkg_fixup_pkgconfig()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/muster)
vcpkg_copy_tools(TOOL_NAMES muster AUTO_CLEAN)
# A command that contains the library looks for the reader beside itself, and vcpkg moves the command.
file(INSTALL "${CURRENT_PACKAGES_DIR}/libexec/muster/muster-hdf5-reader"
  DESTINATION "${CURRENT_PACKAGES_DIR}/tools/muster/hdf5" USE_SOURCE_PERMISSIONS)
foreach(folder include libexec share)
  file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/${folder}")
endforeach()
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
