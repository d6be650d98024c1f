# SPDX-License-Identifier: Apache-2.0
# For Nix: `nix build ./packaging/recipes`. Never built (packaging/recipes/README.md).
{
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-24.11";
  outputs = { self, nixpkgs }:
    let
      pkgs = nixpkgs.legacyPackages.x86_64-linux;
    in
    {
      packages.x86_64-linux.default = pkgs.stdenv.mkDerivation {
        pname = "muster";
        version = "0.2.0";
        src = ../..;
        nativeBuildInputs = with pkgs; [ meson ninja pkg-config cmake python3 ];
        dontUseCmakeConfigure = true;
        buildInputs = with pkgs; [ boost cli11 fmt_9 hdf5 isa-l nlohmann_json re2 xxHash zlib zstd ];
        # Meson finds Boost in Nix only by these variables.
        BOOST_INCLUDEDIR = "${pkgs.lib.getDev pkgs.boost}/include";
        BOOST_LIBRARYDIR = "${pkgs.lib.getLib pkgs.boost}/lib";
        mesonFlags = [ "-Dtests=false" "-Dbenches=false" "-Dpython=disabled" "-Dmpi=disabled" ];
      };
    };
}
