# A formula for a Homebrew tap; `scripts/wheel REPOSITORY_URL` completes it. Not tried on a Mac yet.
class Paceline < Formula
  desc "One OpenAI-compatible endpoint over all of a team's Macs"
  homepage "@REPOSITORY@"
  url "@RELEASE@/@WHEEL@", using: :nounzip
  version "@VERSION@"
  sha256 "@WHEEL_SHA256@"
  license all_of: ["Apache-2.0", "MIT"]

  depends_on "uv" => :build
  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.13"

  # The libraries in wheels have no room for the longer names that Homebrew would write into them.
  preserve_rpath

  resource "constraints" do
    url "@RELEASE@/constraints.txt", using: :nounzip
    sha256 "@CONSTRAINTS_SHA256@"
  end

  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    system "uv", "venv", "--python", python, libexec
    install = %W[uv pip install --python #{libexec}/bin/python --no-deps]
    resource("constraints").stage do
      system(*install, "--require-hashes", "--requirement", "constraints.txt")
    end
    system(*install, "./@WHEEL@")
    bin.install_symlink libexec/"bin/paceline"
  end

  service do
    run [opt_bin/"paceline", "up"]
    keep_alive successful_exit: false
    process_type :interactive
    log_path var/"log/paceline.log"
    error_log_path var/"log/paceline.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/paceline --version")
  end
end
