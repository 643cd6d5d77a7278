//! Installs the plugin, adds inpod to the node's CNI chain, keeps both in place, and removes them without a trace.

fn main() -> std::process::ExitCode {
    installer::main()
}
