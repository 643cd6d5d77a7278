fn main() -> std::process::ExitCode {
    inpod_service::main_on_two_threads(&injector::SERVICE, injector::run)
}
