fn main() -> std::process::ExitCode {
    inpod_service::main(&injector::SERVICE, injector::run)
}
