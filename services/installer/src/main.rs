fn main() -> std::process::ExitCode {
    installer::main()
}
