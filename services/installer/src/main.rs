//! Puts the plugin and its place in the CNI chain on the node, keeps them there, and takes them away without a trace.

fn main() -> std::process::ExitCode {
    installer::main()
}
